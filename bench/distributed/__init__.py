"""Several GPUs: `schedule` predicts and draws, `run` measures under torchrun."""
