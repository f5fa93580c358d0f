"""Clients of servers that run models elsewhere: one neutral form of requests and answers, and a dialect per API."""
