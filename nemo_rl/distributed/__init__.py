"""Processes of ours on this machine or a cluster: the only package that knows Ray."""

from nemo_rl.ray_environment import set_ray_variables

set_ray_variables()  # before a module of this package imports Ray, which reads them then
