"""What Prometheus, Grafana and people see of a server: metrics, a dashboard, alert rules, and a page about them."""
