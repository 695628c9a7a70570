"""Measuring draft methods against plain decoding on files of prompts: the `lilicorr bench` command."""
