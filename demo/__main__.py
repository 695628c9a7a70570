"""`python -m lilicorr_hf.demo`."""

from .cli import demo


demo()
