"""Query engines: DuckDB and Spark behind one interface, and how partial tables are added up."""
