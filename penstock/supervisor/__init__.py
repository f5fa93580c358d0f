"""The process tree of one machine: gateways, engines, and the supervisor that starts, restarts and drains them."""
