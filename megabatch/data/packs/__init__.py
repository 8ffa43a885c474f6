"""Packs: a data set as one file, made of an origin, written by Arrow, read without it."""
