"""Room tidegate/tools/build/inspect."""
