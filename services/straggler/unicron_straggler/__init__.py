"""The straggler service: finds workers that slow a task down. `analysis` is the study behind it, for traces too."""
