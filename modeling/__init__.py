"""Drafter, head and their entry into `generate`; flat, so that the files can travel to the Hub as they are."""
