"""The loops of made-up scripts, as text: how epochs, batches and steps are run, in any combination."""

import random
from dataclasses import dataclass, replace
from textwrap import indent

OUTERS = ("epochs", "epochs", "while", "function", "counting", "stages", "driver", "iterator", "forever")
INNERS = ("for", "for", "enumerate", "numbered", "next", "yielding", "engine", "guarded")
BODIES = ("inline", "inline", "inline", "function", "returning", "partial", "decorated")

STEPS = ("train_step", "train", "update", "run", "forward_backward", "train_one", "advance")
PASSES = ("train_epoch", "fit", "loop", "run_epoch", "one_epoch", "train_loop", "epoch_of")
DECORATORS = {
    "@counting": """
def counting(function):
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        return function(*args, **kwargs)
    wrapper.calls = 0
    return wrapper""",
    "@timed('step')": """
import functools, time
def timed(name):
    def decorator(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                SECONDS[name] = time.perf_counter() - began
        return wrapper
    return decorator
SECONDS = {}""",
    "@torch.enable_grad()": "",
    "@Watching()": """
class Watching(contextlib.ContextDecorator):
    entered = 0
    def __enter__(self):
        Watching.entered += 1
        return self
    def __exit__(self, *error):
        return False""",
}
ENGINE = """
class Engine:
    def __init__(self, process):
        self.process, self.iteration, self.handlers, self.output = process, 0, [], None
    def on_iteration(self, handler):
        self.handlers.append(handler)
        return handler
    def run(self, batches, epoch):
        for batch in batches:
            self.iteration += 1
            self.output = self.process(self, batch, epoch)
            for handler in self.handlers:
                handler(self)"""
DRIVER = """
class Driver:
    def __init__(self, begin, over, end):
        self.begin, self.over, self.end, self.epoch = begin, over, end, 0
    def fit(self, epochs):
        for self.epoch in range(epochs):
            self.begin(self.epoch)
            self.over(self.epoch)
            if self.end(self.epoch):
                break"""


def block(*texts: str) -> str:
    """Return lines one after the other, without those that are empty."""
    return "\n".join(text.strip("\n") for text in texts if text.strip())


def deeper(text: str, levels: int = 1) -> str:
    """Return lines further to the right."""
    return indent(text, "    " * levels)


@dataclass(frozen=True)
class Body:
    """What loops are made of."""

    item: str  # what a batch is unpacked to
    source: str  # what an epoch goes over
    epoch: str  # as one begins
    step: str
    closing: str  # as one is over
    stop: str = ""  # when the epoch is the last
    rounds: str = ""  # what the outer loop goes over, where that is not a range


@dataclass(frozen=True)
class Loops:
    """Loops, and what they need elsewhere."""

    loops: str
    functions: str = ""
    setup: str = ""
    late: str = ""  # set up when the functions are there
    classes: str = ""
    imports: str = ""

    def with_more(self, **texts: str) -> "Loops":
        """Return them with more of something."""
        return replace(self, **{name: block(getattr(self, name), text) for name, text in texts.items()})


def loops(outer: str, inner: str, how: str, body: Body, dice: random.Random) -> Loops:
    """Return the loops of a script, by how epochs, batches and steps are run."""
    step_name, pass_name = dice.choice(STEPS), dice.choice(PASSES)
    made, step = _step(how, body, step_name, dice)
    leave = "continue" if how == "inline" and (inner != "engine" or outer in {"iterator", "forever"}) else "return"
    made = replace(made, functions=made.functions.replace("@skip", "return"))
    step = step.replace("@skip", leave)
    if outer == "iterator":
        return made.with_more(loops=_by_iterator(body, step))
    if outer == "forever":
        return _by_generator(made, body, step)
    made, batches = _batches(inner, made, body, step)
    return _epochs(outer, made, body, batches, pass_name)


def _step(how: str, body: Body, name: str, dice: random.Random) -> tuple[Loops, str]:
    """Return what a step needs, and how it is run in a loop's body."""
    called = f"$${name}(epoch, {body.item})"
    function = block(f"def {name}(epoch, {body.item}):", deeper(body.step))
    match how:
        case "function":
            return Loops("", function), called
        case "returning":
            return Loops("", block(function, "    return float(loss.detach())")), f"$newest_loss = {called}"
        case "partial":
            function = function.replace("(epoch, ", "(factor, epoch, ", 1)
            bound = f"$bound = functools.partial($${name}, 1.0)"
            return Loops("", function, late=bound, imports="import functools"), f"$bound(epoch, {body.item})"
        case "decorated":
            decorator = dice.choice(sorted(DECORATORS))
            return Loops("", block(decorator, function), classes=DECORATORS[decorator]), called
    return Loops(""), body.step


def _batches(inner: str, made: Loops, body: Body, step: str) -> tuple[Loops, str]:
    """Return the loop over batches, and what it needs."""
    plain = block(f"for {body.item} in {body.source}:", deeper(step))
    item = f"({body.item})" if "," in body.item else body.item
    heads = {
        "enumerate": f"for index, {item} in enumerate({body.source}):",
        "numbered": f"for index, {item} in zip(range(10**6), {body.source}):",
    }
    if inner in heads:
        return made, block(heads[inner], deeper(step))
    match inner:
        case "next":
            taken = f"batches = iter({body.source})\nwhile (taken := next(batches, None)) is not None:"
            plain = block(taken, deeper(block(f"{body.item} = taken", step)))
        case "guarded":
            plain = block("try:", deeper(plain), "except KeyboardInterrupt:\n    raise")
        case "yielding":
            function = block("def stepping(epoch):", deeper(block(plain, "    yield $step")))
            made = made.with_more(functions=function, setup="$seen_steps = []")
            plain = "for seen_step in $$stepping(epoch):\n    $seen_steps.append(seen_step)"
        case "engine":
            function = block("def process(engine, taken, epoch):", deeper(block(f"{body.item} = taken", step)))
            made = made.with_more(functions=function, late="$engine = Engine($$process)", classes=ENGINE)
            plain = f"$engine.run({body.source}, epoch)"
    return made, plain


def _epochs(outer: str, made: Loops, body: Body, batches: str, name: str) -> Loops:
    """Return the loop over epochs around that over batches, with what both need."""
    closing = block(body.closing, f"if {body.stop}:\n    break" if body.stop else "")
    all_of_it = block(body.epoch, batches, closing)
    rounds = f"for epoch in {body.rounds or 'range(@epochs)'}:"
    match outer:
        case "while":
            return made.with_more(
                loops=block("epoch = 0\nwhile epoch < @epochs:", deeper(block(all_of_it, "epoch += 1")))
            )
        case "function":
            function = block(f"def {name}(epoch):", deeper(batches))
            loop = block(rounds, deeper(block(body.epoch, f"$${name}(epoch)", closing)))
            return made.with_more(functions=function, loops=loop)
        case "counting":
            ends = block("for epoch in itertools.count():\n    if epoch == @epochs:\n        break", deeper(all_of_it))
            return made.with_more(loops=ends, imports="import itertools")
        case "stages":
            within = "for epoch in range(stage * @epochs // 2, (stage + 1) * @epochs // 2):"
            return made.with_more(loops=block("for stage in range(2):", deeper(block(within, deeper(all_of_it)))))
        case "driver":
            functions = block("def begin_epoch(epoch):", deeper(body.epoch or "pass"))
            functions = block(functions, f"def {name}(epoch):", deeper(batches), "def end_epoch(epoch):")
            functions = block(functions, deeper(block(body.closing, f"return {body.stop or 'False'}")))
            driver = f"$driver = Driver($$begin_epoch, $${name}, $$end_epoch)"
            return made.with_more(functions=functions, late=driver, classes=DRIVER, loops="$driver.fit(@epochs)")
    return made.with_more(loops=block(rounds, deeper(all_of_it)))


def _by_iterator(body: Body, step: str) -> str:
    """Return one loop, which takes batches from an iterator that it makes anew when it is used up."""
    batches = f"batches = iter({body.source})"
    ended = deeper(block(body.closing, "epoch += 1", body.epoch, batches, "continue"), 2)
    taken = f"    try:\n        {body.item} = next(batches)\n    except StopIteration:\n{ended}"
    return block("epoch = 0", body.epoch, batches, "while $step < @total:", taken, deeper(step), body.closing)


def _by_generator(made: Loops, body: Body, step: str) -> Loops:
    """Return one loop, which takes batches from a generator that goes over the data for ever."""
    function = f"def forever():\n    while True:\n        for each in {body.source}:\n            yield each"
    ends = block("if index % @batches == @batches - 1:", deeper(block(body.closing, "epoch += 1", body.epoch)))
    loop = f"batches = $$forever()\nfor index in range(@total):\n    {body.item} = next(batches)"
    return made.with_more(functions=function, loops=block("epoch = 0", body.epoch, loop, deeper(block(step, ends))))
