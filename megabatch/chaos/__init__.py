"""Chaos: the real job while it is killed, stopped, asked to stop and starved of disk, on a schedule
made from a seed; it must end with the weights of the undisturbed run, every step taken once.
"""
