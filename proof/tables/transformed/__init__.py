"""What transform coding gains, on real models."""
