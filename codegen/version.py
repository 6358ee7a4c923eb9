"""The version of Flexpress, `flexpress.__version__`: pyproject.toml reads it here, and printed kernels are kept by it."""

VERSION = "0.2.0"
