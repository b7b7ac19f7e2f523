"""Silent errors that people made, written anew at tiny size: which do the audits find and name?"""
