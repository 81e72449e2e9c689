"""Traces of a job made up, as files that `unicron straggler` reads."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from unicron_simulator import synthetic
from unicron_simulator.planting import Shape
from unicron_straggler.analysis.trace import OPTYPES

SHAPE = Shape(dp=3, pp=2, microbatches=4, steps=6)

COLUMNS = ("dp_rank", "stage", "rank", "step", "duration", "seq_id", "mc", "mb_id", "gmc")


def write_trace(folder, name, *plants):
    """Write a run of the job as trace-NAME.parquet, slowed by what is planted, with its sizes beside it."""
    trace = synthetic.make(SHAPE, seed=5, plants=list(plants), name=name)
    columns = {column: getattr(trace, column) for column in COLUMNS}
    columns |= {"start_ts": trace.start, "optype": np.array(OPTYPES)[trace.optype]}
    pq.write_table(pa.table(columns), folder / f"trace-{name}.parquet")
    (folder / f"meta-{name}.yaml").write_text(f"trial_name: {name}\ndp_size: 3\npp_size: 2\n")
