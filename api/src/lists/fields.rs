//! The fields that the records of a list can be sorted and filtered by, derived from their schema.

use utoipa::openapi::RefOr;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{Array, ArrayBuilder, ArrayItems, ObjectBuilder, Schema, SchemaType, Type};

use super::sorting::Sort;
use crate::schemas::{NamedSchemas, resolve};

/// Fields that identify a record within its list, the first that it has.
const IDENTITIES: &[&str] = &["uuid", "event_uuid", "address", "name"];
/// The name for the items of a list that are not records.
const ITEM: &str = "name";
/// The fields of records whose schema lists none: those of artifacts and blobs.
const UNLISTED_FIELDS: &[(&str, FieldKind)] = &[
    ("uuid", FieldKind::Text),
    ("state", FieldKind::Text),
    ("source_url", FieldKind::Text),
    ("size", FieldKind::Number),
];

/// The type of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FieldKind {
    Text,
    Number,
    Boolean,
}

/// What is known about the records of a list.
#[derive(Debug, Clone)]
pub(crate) struct ListFields {
    fields: Vec<(String, FieldKind)>,
    /// The field that identifies a record.
    pub(crate) identity: String,
    /// The order of a list that is not read in pages.
    pub(crate) default_sort: Sort,
    /// Whether the list has always had a limit, and only its own order: it may be very long.
    pub(crate) is_history: bool,
}

impl ListFields {
    /// Derives the fields from the schema of a list.
    pub(crate) fn new(list: &RefOr<Schema>, schemas: &NamedSchemas) -> Self {
        let mut fields = Vec::new();
        match list {
            RefOr::T(Schema::Array(Array { items: ArrayItems::RefOrSchema(items), .. })) => {
                match kind(items, schemas) {
                    Some(kind) => fields.push((ITEM.to_owned(), kind)),
                    None => collect(items, schemas, &mut fields),
                }
            }
            _ => debug_assert!(false, "the schema of a list is not an array"),
        }
        if fields.is_empty() {
            fields = UNLISTED_FIELDS.iter().map(|(name, kind)| ((*name).to_owned(), *kind)).collect();
        }
        fields.sort_by(|a, b| a.0.cmp(&b.0));
        fields.dedup_by(|a, b| a.0 == b.0);
        let has = |name: &str| fields.iter().any(|(known, _)| known == name);
        let identity = IDENTITIES.iter().find(|name| has(name)).unwrap_or(&ITEM);
        let default_sort = match () {
            () if has("timestamp") => Sort::descending("timestamp"),
            () if has("created") => Sort::descending("created"),
            () if has("order") => Sort::ascending("order"),
            // The versions of an artifact. Artifacts themselves have names.
            () if has("index") && !has("name") => Sort::ascending("index"),
            () => Sort::ascending(identity),
        };
        let is_history = has("timestamp") && has("event_uuid");
        Self { identity: (*identity).to_owned(), default_sort, is_history, fields }
    }

    pub(crate) fn kind(&self, field: &str) -> Option<FieldKind> {
        self.fields.iter().find(|(name, _)| name == field).map(|(_, kind)| *kind)
    }

    /// Returns the names of the fields as a text.
    pub(crate) fn names(&self) -> String {
        let names: Vec<&str> = self.fields.iter().map(|(name, _)| name.as_str()).collect();
        names.join(", ")
    }

    /// Returns the parameters of the list for the OpenAPI document.
    pub(crate) fn parameters(&self) -> Vec<Parameter> {
        let text = || ObjectBuilder::new().schema_type(Type::String).build();
        let limit = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(1)).build();
        let filters = ArrayBuilder::new().items(text()).build();
        let names = format!("`{}`", self.names().replace(", ", "`, `"));
        let sort = if self.is_history {
            "The order: only `-timestamp`, newest first.".to_owned()
        } else {
            format!("The field that the list is sorted by, with `-` in front for descending order: {names}.")
        };
        let filter = format!(
            "Return only records with this value: `FIELD:VALUE`; `FIELD:PREFIX*` for texts that start with a prefix, \
             `FIELD:null` for fields without a value. Repeat it for several conditions. Fields: {names}."
        );
        let limit_text = "The maximum number of records, up to 1000. If there may be more, the response has the header \
                          `Link` with the next page, and its cursor in `X-Next-Cursor`. With `cursor`, `sort` or \
                          `filter` the default is 1000.";
        let cursor = "Continue where a page has ended: the value of `X-Next-Cursor`.";
        [
            (ListParameter::Limit, limit_text.to_owned(), Schema::from(limit)),
            (ListParameter::Cursor, cursor.to_owned(), text().into()),
            (ListParameter::Sort, sort, text().into()),
            (ListParameter::Filter, filter, filters.into()),
        ]
        .into_iter()
        .map(|(parameter, description, schema)| {
            ParameterBuilder::new()
                .name(parameter.name())
                .parameter_in(ParameterIn::Query)
                .description(Some(description))
                .schema(Some(schema))
                .build()
        })
        .collect()
    }
}

/// A parameter of every list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListParameter {
    Limit,
    Cursor,
    Sort,
    Filter,
}

impl ListParameter {
    const ALL: [Self; 4] = [Self::Limit, Self::Cursor, Self::Sort, Self::Filter];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Cursor => "cursor",
            Self::Sort => "sort",
            Self::Filter => "filter",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|parameter| parameter.name() == name)
    }
}

/// Adds the fields of a record that have a single value.
fn collect(schema: &RefOr<Schema>, schemas: &NamedSchemas, fields: &mut Vec<(String, FieldKind)>) {
    match resolve(schema, schemas) {
        Some(Schema::Object(object)) => {
            for (name, field) in &object.properties {
                if let Some(kind) = kind(field, schemas) {
                    fields.push((name.clone(), kind));
                }
            }
        }
        Some(Schema::AllOf(all)) => {
            for part in &all.items {
                collect(part, schemas, fields);
            }
        }
        _ => {}
    }
}

/// Returns the type of a field; `None` if it is a list or a record.
fn kind(schema: &RefOr<Schema>, schemas: &NamedSchemas) -> Option<FieldKind> {
    match resolve(schema, schemas)? {
        Schema::Object(object) => match &object.schema_type {
            SchemaType::Type(schema_type) => kind_of_type(schema_type),
            SchemaType::Array(types) => types.iter().find_map(kind_of_type),
            SchemaType::AnyValue => None,
        },
        Schema::OneOf(one) => one.items.iter().find_map(|item| kind(item, schemas)),
        _ => None,
    }
}

fn kind_of_type(schema_type: &Type) -> Option<FieldKind> {
    match schema_type {
        Type::String => Some(FieldKind::Text),
        Type::Integer | Type::Number => Some(FieldKind::Number),
        Type::Boolean => Some(FieldKind::Boolean),
        _ => None,
    }
}
