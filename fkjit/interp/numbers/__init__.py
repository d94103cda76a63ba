"""Floating types as bits: conversion, rounding, subnormals, elements of matrices."""
