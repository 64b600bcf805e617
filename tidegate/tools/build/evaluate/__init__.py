"""Room tidegate/tools/build/evaluate."""
