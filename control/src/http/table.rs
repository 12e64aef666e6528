//! The table of routes: a route cannot be added without saying who may call it.

use std::sync::Arc;

use axum::Router;
use axum::middleware::from_fn_with_state;
use utoipa::openapi::path::HttpMethod;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{ComponentsBuilder, InfoBuilder, OpenApi, OpenApiBuilder};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};

use super::guard::{Guard, check};
use super::request::not_found;
use crate::app::App;

/// Who may call a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Anyone, without a token.
    Public,
    /// Any namespace's token.
    Token,
    /// Only the namespace `system`.
    Admin,
}

/// A route, as tests and documents see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteInfo {
    pub method: String,
    pub path: String,
    pub access: Access,
    pub family: &'static str,
}

pub(super) struct Table {
    app: Arc<App>,
    router: OpenApiRouter<Arc<App>>,
    routes: Vec<RouteInfo>,
}

impl Table {
    pub(super) fn new(app: &Arc<App>) -> Self {
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).bearer_format("JWT").build();
        let document = OpenApiBuilder::new()
            .info(
                InfoBuilder::new()
                    .title("Muster")
                    .version(env!("CARGO_PKG_VERSION"))
                    .description(Some("A private cloud in one program."))
                    .build(),
            )
            .components(Some(
                ComponentsBuilder::new().security_scheme("bearerAuth", SecurityScheme::Http(bearer)).build(),
            ))
            .build();
        Self { app: Arc::clone(app), router: OpenApiRouter::with_openapi(document), routes: vec![] }
    }

    /// Adds handlers of one path. `family` names the scope that a token needs.
    pub(super) fn add(
        &mut self,
        access: Access,
        family: &'static str,
        handlers: UtoipaMethodRouter<Arc<App>>,
    ) {
        let (schemas, mut paths, mut methods) = handlers;
        for (path, item) in &mut paths.paths {
            let operations = [
                (HttpMethod::Get, &mut item.get),
                (HttpMethod::Post, &mut item.post),
                (HttpMethod::Put, &mut item.put),
                (HttpMethod::Delete, &mut item.delete),
            ];
            for (method, operation) in operations {
                let Some(operation) = operation else { continue };
                let method = match method {
                    HttpMethod::Post => "POST",
                    HttpMethod::Put => "PUT",
                    HttpMethod::Delete => "DELETE",
                    _ => "GET",
                };
                if access != Access::Public {
                    operation.security = Some(vec![SecurityRequirement::new("bearerAuth", [""; 0])]);
                }
                self.routes.push(RouteInfo { method: method.into(), path: path.clone(), access, family });
            }
        }
        if access != Access::Public {
            let guard = Guard { app: Arc::clone(&self.app), access, family };
            methods = methods.route_layer(from_fn_with_state(guard, check));
        }
        let router = std::mem::take(&mut self.router);
        self.router = router.routes((schemas, paths, methods));
    }

    pub(super) fn finish(self) -> (Router, OpenApi, Vec<RouteInfo>) {
        let (router, document) = self.router.split_for_parts();
        (router.fallback(not_found).with_state(self.app), document, self.routes)
    }
}
