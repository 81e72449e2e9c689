"""`benchmarks.struck` for megatron-core, which is imported ahead for scripts that import it."""

import megatron.core  # noqa: F401

from benchmarks.struck import run

if __name__ == "__main__":
    run()
