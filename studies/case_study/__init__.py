"""The paper's case study, behind run_case_study.py."""
