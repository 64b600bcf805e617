"""What devices kept while they were away: taken once, computed where it was deferred, and kept for operators."""
