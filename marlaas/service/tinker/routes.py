"""All routes of `/api/v1`."""

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
from marlaas.service.tinker.door import PREFIX, known_parameters_only

router = APIRouter(prefix=PREFIX)
for surface in (sessions, training, sampling, futures, records, search, downloads):
    router.include_router(surface.router, dependencies=[Depends(known_parameters_only)])
router.include_router(refused.router)

open_routes = APIRouter(prefix=PREFIX)
open_routes.include_router(downloads.open_routes)
