"""Configurations of balancers in front of several gateways: HAProxy, nginx, Envoy."""
