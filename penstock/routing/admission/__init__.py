"""Who may run now, who waits, who is turned away: the queue between quotas and engines."""
