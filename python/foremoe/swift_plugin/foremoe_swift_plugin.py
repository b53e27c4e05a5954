"""The file for ms-swift's --external_plugins. See foremoe.swift."""

import foremoe.swift
from foremoe._import_hook import WhenImported

WhenImported({"swift.megatron.trainers.base": foremoe.swift.init}).install()
