"""All routes of `/api/v1`.

Each module's router has the prefix itself, so that logs and metrics name routes by whole paths.
"""

from fastapi import APIRouter, Depends

from marlaas.service.tinker import (
    downloads,
    futures,
    records,
    refused,
    sampling,
    search,
    sessions,
    training,
)
from marlaas.service.tinker.door import known_parameters_only

router = APIRouter()
for surface in (sessions, training, sampling, futures, records, search, downloads):
    router.include_router(surface.router, dependencies=[Depends(known_parameters_only)])
router.include_router(refused.router)

open_routes = APIRouter()
open_routes.include_router(downloads.open_routes)
