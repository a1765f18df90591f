"""What ``./dev bench`` measures: farandole beside its peers and beside the floors, in one invocation.

``python -m farandole.bench`` prints tables and writes JSON. A subject is a module with
``measure(settings, pair)``. Its peers take turns, round after round (A B C A B C ...), so that a
machine that slows down slows all of them; a ratio is the median over rounds of the ratio within
one.
"""
