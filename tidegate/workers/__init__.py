"""Worker processes: a child that loads engines and computes, and the parent's end of it."""
