"""Load generation and reports: the fixed workloads, the offline engine benchmark, the server benchmark, the
comparison with a peer. Every figure is printed beside the bound or the peer measured in the same run."""
