"""What holds for every test."""

from hypothesis import settings

# A busy machine is no failure: what takes too long for good meets pytest's own timeout.
settings.register_profile("numaserve", deadline=None)
settings.load_profile("numaserve")
