//! Reading the schemas of the OpenAPI document.

use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{Schema, SchemaType, Type};

/// Schemas by name.
pub(crate) type NamedSchemas = [(String, RefOr<Schema>)];

/// Follows references to named schemas.
pub(crate) fn resolve<'a>(schema: &'a RefOr<Schema>, schemas: &'a NamedSchemas) -> Option<&'a Schema> {
    match schema {
        RefOr::T(schema) => Some(schema),
        RefOr::Ref(reference) => {
            let name = reference.ref_location.rsplit('/').next()?;
            resolve(&schemas.iter().find(|(known, _)| known == name)?.1, schemas)
        }
    }
}

/// Returns the schema of a member of an object.
pub(crate) fn property<'a>(
    schema: &'a RefOr<Schema>,
    name: &str,
    schemas: &'a NamedSchemas,
) -> Option<&'a RefOr<Schema>> {
    match resolve(schema, schemas)? {
        Schema::Object(object) => object.properties.get(name),
        Schema::AllOf(all) => all.items.iter().find_map(|part| property(part, name, schemas)),
        _ => None,
    }
}

/// Returns whether a schema describes an object with members.
pub(crate) fn is_object(schema: &RefOr<Schema>, schemas: &NamedSchemas) -> bool {
    match resolve(schema, schemas) {
        Some(Schema::Object(object)) => matches!(object.schema_type, SchemaType::Type(Type::Object)),
        Some(Schema::AllOf(_)) => true,
        _ => false,
    }
}
