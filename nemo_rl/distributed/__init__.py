"""Processes of ours on this machine or a cluster: the only package that knows Ray."""
