"""The straggler service: who slows a running task down. `analysis` is the study behind it, for traces too."""
