"""Programs built on the engine: conversion of checkpoints, the doctor, profiles and comparisons."""
