"""The Streamlit dashboard: it draws what `analysis` computes."""
