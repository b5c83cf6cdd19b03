"""GPUs: what one is (`device`), how fast it is (`device_model`), which tables are for it (`silicon`), and what the
driver and NVML say."""
