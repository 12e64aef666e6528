//! The table of routes. A route cannot be added without its access.

use std::collections::HashSet;
use std::sync::Arc;

use axum::Router;
use axum::http::Method;
use axum::middleware::{from_fn, from_fn_with_state};
use utoipa::openapi::schema::Schema;
use utoipa::openapi::{OpenApi, RefOr};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};

use crate::access::{Access, RouteInfo, required_scope};
use crate::body::BodyMemory;
use crate::document::{self, OperationContext};
use crate::guard::{Guard, check};
use crate::lists::{self, ListFields};
use crate::request::{name_route, not_found};
use crate::response::{DocumentedHandler, Success};
use crate::schemas::is_object;
use crate::waiting::{self, WaitableStates};
use muster_control::app::App;

/// A handler with its annotation and the description of its response.
pub(crate) struct Endpoint {
    routes: UtoipaMethodRouter<Arc<App>>,
    success: Option<Success>,
}

impl Endpoint {
    pub(crate) fn new<Arguments>(
        mut routes: UtoipaMethodRouter<Arc<App>>,
        handler: &impl DocumentedHandler<Arguments>,
    ) -> Self {
        let mut success = handler.success();
        if let Some(success) = &mut success {
            routes.0.append(&mut success.schemas);
        }
        Self { routes, success }
    }
}

/// Lists handlers for [`RouteTable::add`].
macro_rules! handlers {
    ($($handler:path),+ $(,)?) => {
        [$($crate::table::Endpoint::new(utoipa_axum::routes!($handler), &$handler)),+]
    };
}
pub(crate) use handlers;

pub(crate) struct RouteTable {
    app: Arc<App>,
    router: OpenApiRouter<Arc<App>>,
    routes: Vec<RouteInfo>,
    bodies: Arc<BodyMemory>,
    /// The paths of records, which have tags.
    records: HashSet<String>,
}

impl RouteTable {
    pub(crate) fn new(app: &Arc<App>) -> Self {
        let router = OpenApiRouter::with_openapi(document::empty());
        let bodies = Arc::new(BodyMemory::new(&app.settings));
        Self { app: Arc::clone(app), router, routes: vec![], bodies, records: HashSet::new() }
    }

    /// Adds handlers. `family` is the first part of the scope that a token needs; empty if it needs none.
    pub(crate) fn add<const N: usize>(
        &mut self,
        access: Access,
        family: &'static str,
        handlers: [Endpoint; N],
    ) {
        self.add_with_verb(access, family, None, handlers);
    }

    /// Adds handlers that need a scope of the given verb instead of the one that follows from the method.
    pub(crate) fn add_with_verb<const N: usize>(
        &mut self,
        access: Access,
        family: &'static str,
        verb: Option<&'static str>,
        handlers: [Endpoint; N],
    ) {
        for endpoint in handlers {
            self.add_endpoint(access, family, verb, endpoint);
        }
    }

    fn add_endpoint(
        &mut self,
        access: Access,
        family: &'static str,
        verb: Option<&'static str>,
        endpoint: Endpoint,
    ) {
        let (schemas, mut paths, mut methods) = endpoint.routes;
        self.check_names(&schemas);
        let mut success = endpoint.success;
        let listed = success.as_ref().filter(|success| success.is_list);
        let list = listed.map(|success| Arc::new(ListFields::new(&success.body, &schemas)));
        let record = success.as_ref().filter(|success| !success.is_list && access != Access::Public);
        let record = record.filter(|success| is_object(&success.body, &schemas));
        let is_record = record.is_some() && paths.paths.values().all(|item| item.get.is_some());
        let states =
            record.filter(|_| is_record).and_then(|success| WaitableStates::of(&success.body, &schemas));
        let states = states.map(Arc::new);
        if is_record {
            self.records.extend(paths.paths.keys().cloned());
        }
        let guarded = access != Access::Public;
        for (path, item) in &mut paths.paths {
            let operations = [
                (&Method::GET, &mut item.get),
                (&Method::POST, &mut item.post),
                (&Method::PUT, &mut item.put),
                (&Method::DELETE, &mut item.delete),
            ];
            for (method, operation) in operations {
                let Some(operation) = operation else { continue };
                let scope = if guarded { required_scope(family, verb, method) } else { String::new() };
                let (scope_text, success) = (scope.as_str(), success.take());
                let (schemas, list, states) = (&schemas, list.as_deref(), states.as_deref());
                let context = OperationContext {
                    method,
                    path,
                    access,
                    scope: scope_text,
                    success,
                    schemas,
                    list,
                    states,
                    is_record,
                };
                document::complete(operation, context);
                let (method, path) = (method.to_string(), path.clone());
                self.routes.push(RouteInfo { method, path, access, scope });
            }
        }
        let (app, bodies) = (Arc::clone(&self.app), Arc::clone(&self.bodies));
        let guard = Guard { app, access, family, verb, is_record, bodies };
        if let Some(list) = list {
            methods = methods.route_layer(from_fn_with_state(list, lists::select));
        }
        if let Some(states) = states {
            methods = methods.route_layer(from_fn_with_state(states, waiting::wait));
        }
        methods = methods.route_layer(from_fn_with_state(guard, check)).route_layer(from_fn(name_route));
        let router = std::mem::take(&mut self.router);
        self.router = router.routes((schemas, paths, methods));
    }

    /// Checks that no two schemas have the same name: only one of them would be in the document.
    fn check_names(&self, schemas: &[(String, RefOr<Schema>)]) {
        let components = self.router.get_openapi().components.as_ref();
        let known = components.map(|components| &components.schemas);
        for (index, (name, schema)) in schemas.iter().enumerate() {
            let same_name =
                schemas[..index].iter().filter(|(other, _)| other == name).map(|(_, other)| other);
            let mut others = same_name.chain(known.and_then(|known| known.get(name)));
            debug_assert!(others.all(|other| other == schema), "two schemas have the name {name}");
        }
    }

    pub(crate) fn finish(self) -> (Router, OpenApi, Vec<RouteInfo>, HashSet<String>) {
        let (router, mut document) = self.router.split_for_parts();
        document::describe_preconditions(&mut document, &self.records);
        // `{*name}` is the notation of the router for parameters with slashes.
        let paths = std::mem::take(&mut document.paths.paths);
        document.paths.paths =
            paths.into_iter().map(|(path, item)| (path.replace("{*", "{"), item)).collect();
        (router.fallback(not_found).with_state(self.app), document, self.routes, self.records)
    }
}
