"""The edge agent's decisions, free of IO."""
