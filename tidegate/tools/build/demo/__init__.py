"""Room tidegate/tools/build/demo."""
