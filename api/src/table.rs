//! The table of routes: a route cannot be added without saying who may call it.

use std::sync::Arc;

use axum::Router;
use axum::http::Method;
use axum::middleware::from_fn_with_state;
use utoipa::openapi::path::Operation;
use utoipa::openapi::schema::{Object, ObjectBuilder, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    ComponentsBuilder, Content, InfoBuilder, OpenApi, OpenApiBuilder, Ref, RefOr, Response,
};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};

use crate::guard::{Guard, check};
use crate::request::not_found;
use muster_control::app::App;

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
    /// What a token needs to be scoped for, empty where none is needed. Administrative routes need
    /// [`CLUSTER_ADMIN`](muster_control::auth::scopes::CLUSTER_ADMIN) besides.
    pub scope: String,
}

pub(crate) struct Table {
    app: Arc<App>,
    router: OpenApiRouter<Arc<App>>,
    routes: Vec<RouteInfo>,
}

impl Table {
    pub(crate) fn new(app: &Arc<App>) -> Self {
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
                ComponentsBuilder::new()
                    .security_scheme("bearerAuth", SecurityScheme::Http(bearer))
                    .schema("Error", error_schema())
                    .build(),
            ))
            .build();
        Self { app: Arc::clone(app), router: OpenApiRouter::with_openapi(document), routes: vec![] }
    }

    /// Adds handlers of one path. `family` names the scope that a token needs.
    pub(crate) fn add(
        &mut self,
        access: Access,
        family: &'static str,
        handlers: UtoipaMethodRouter<Arc<App>>,
    ) {
        self.add_for(access, family, None, handlers);
    }

    /// The same for handlers that need more than to read or to write: a scope of their own, of that verb.
    pub(crate) fn add_for(
        &mut self,
        access: Access,
        family: &'static str,
        verb: Option<&'static str>,
        handlers: UtoipaMethodRouter<Arc<App>>,
    ) {
        let (schemas, mut paths, mut methods) = handlers;
        for (path, item) in &mut paths.paths {
            let operations = [
                (&Method::GET, &mut item.get),
                (&Method::POST, &mut item.post),
                (&Method::PUT, &mut item.put),
                (&Method::DELETE, &mut item.delete),
            ];
            for (method, operation) in operations {
                let Some(operation) = operation else { continue };
                describe(operation, method.as_str(), path, access);
                let scope = match access {
                    Access::Public => String::new(),
                    Access::Token | Access::Admin => required_scope(family, verb, method),
                };
                let (method, path) = (method.to_string(), path.clone());
                self.routes.push(RouteInfo { method, path, access, scope });
            }
        }
        if access != Access::Public {
            let guard = Guard { app: Arc::clone(&self.app), access, family, verb };
            methods = methods.route_layer(from_fn_with_state(guard, check));
        }
        let router = std::mem::take(&mut self.router);
        self.router = router.routes((schemas, paths, methods));
    }

    pub(crate) fn finish(self) -> (Router, OpenApi, Vec<RouteInfo>) {
        let (router, mut document) = self.router.split_for_parts();
        // A path that may contain slashes is the router's business alone.
        let paths = std::mem::take(&mut document.paths.paths);
        document.paths.paths =
            paths.into_iter().map(|(path, item)| (path.replace("{*", "{"), item)).collect();
        (router.fallback(not_found).with_state(self.app), document, self.routes)
    }
}

/// Adds to a route's description what all routes have in common.
fn describe(operation: &mut Operation, method: &str, path: &str, access: Access) {
    let words = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let id =
        std::iter::once(method.to_lowercase()).chain(words.map(str::to_owned)).collect::<Vec<_>>().join("_");
    operation.operation_id = Some(id);
    if access != Access::Public {
        operation.security = Some(vec![SecurityRequirement::new("bearerAuth", [""; 0])]);
        let refusals = [
            ("400", "a parameter is missing, malformed or not declared"),
            ("401", "no valid token, or not for this namespace"),
            ("403", "the token is not scoped for this"),
            ("503", "the database does not answer"),
        ];
        for (status, text) in refusals {
            let add = || RefOr::T(Response::new(text));
            operation.responses.responses.entry(status.to_owned()).or_insert_with(add);
        }
    }
    for (status, response) in &mut operation.responses.responses {
        let RefOr::T(response) = response else { continue };
        if response.description.is_empty() {
            response.description = "done".into();
        }
        if status.starts_with(['4', '5']) && response.content.is_empty() {
            let content = Content::new(Some(Ref::from_schema_name("Error")));
            response.content.insert("application/json".into(), RefOr::T(content));
        }
    }
}

/// The body of every refusal.
fn error_schema() -> Object {
    ObjectBuilder::new()
        .property("error", ObjectBuilder::new().schema_type(Type::String).description(Some("what is wrong")))
        .property(
            "status",
            ObjectBuilder::new().schema_type(Type::Integer).description(Some("the HTTP status")),
        )
        .required("error")
        .required("status")
        .build()
}

/// Returns the scope a call needs: the family of the route, and its verb or else the one of the method.
pub(crate) fn required_scope(family: &str, verb: Option<&str>, method: &Method) -> String {
    let usual = match *method {
        Method::GET | Method::HEAD | Method::OPTIONS => "read",
        Method::DELETE => "delete",
        _ => "write",
    };
    format!("{family}.{}", verb.unwrap_or(usual))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verb_follows_the_method() {
        assert_eq!(required_scope("auth", None, &Method::GET), "auth.read");
        assert_eq!(required_scope("auth", None, &Method::HEAD), "auth.read");
        assert_eq!(required_scope("auth", None, &Method::PUT), "auth.write");
        assert_eq!(required_scope("auth", None, &Method::DELETE), "auth.delete");
        assert_eq!(required_scope("instance", Some("execute"), &Method::POST), "instance.execute");
    }
}
