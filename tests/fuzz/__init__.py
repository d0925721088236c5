"""Hostile arguments for everything public, in a process that is watched: `make fuzz SECONDS=600`.

A call is text: a program of `programs.py` with «holes», some of which `hostile.py` fills otherwise. So a finding is its own reproduction,
and smaller by every hole that can be filled as usual again. Which call has the number i follows from the seed alone.
"""
