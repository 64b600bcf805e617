"""The operators' page: what is watched, what is said of it (`verdict`, `view`), and how it is served (`page`)."""
