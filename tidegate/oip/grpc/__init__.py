"""Room tidegate/oip/grpc."""
