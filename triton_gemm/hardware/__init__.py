"""GPUs: properties (`device`), names and peak rates (`gpus`), the cost model's parameters (`device_model`), GPU keys of
tables (`gpu_key`), and what the driver and NVML report."""
