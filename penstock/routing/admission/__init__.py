"""Admission: the queue between quotas and engines. It decides which requests run now, wait, or are refused."""
