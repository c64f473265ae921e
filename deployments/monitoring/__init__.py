"""What Prometheus and Grafana are to do with our metrics, as code: `python -m deployments.monitoring` writes k8s/monitoring."""
