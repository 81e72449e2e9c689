"""Models and layouts for the tests of the throughput model."""

import msgspec
import numpy as np

from unicron.contracts.tasks import ModelSpec
from unicron.costmodel import catalogue, formulas
from unicron.costmodel.costs import LayoutArrays


def gpt(size, **entries):
    return ModelSpec(**{**msgspec.structs.asdict(catalogue.size(size)), "batch": 1536, **entries})


def one(tensor=1, pipeline=1, data=1, microbatch=1, recompute=formulas.FULL, distributed=False, **entries):
    degrees = (np.array([each]) for each in (tensor, pipeline, data, microbatch, recompute))
    return LayoutArrays(*degrees, distributed=np.array([distributed]), **entries)
