"""Room tidegate/tools/build/convert."""
