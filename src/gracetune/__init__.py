"""Fine-tune diffusion models on machines whose CPU and GPU memory work as one."""

__version__ = "0.1.0"
