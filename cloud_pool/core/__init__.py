"""The pool's decisions, free of IO."""
