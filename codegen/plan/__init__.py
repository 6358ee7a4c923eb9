"""Which kernel a call gets and with what tile, from structure alone: one module for each kernel family."""
