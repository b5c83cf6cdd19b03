"""GPUs: what one is (`device`), which have names, and their peaks (`gpus`), how fast one is (`device_model`), which
tables are for it (`silicon`), and what the driver and NVML say."""
