"""Programs built on the engine: conversion of checkpoints, the doctor and profiles."""
